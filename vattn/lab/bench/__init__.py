"""Measuring: the same load on every KV backend, and on other engines.

    workload, synthetic, trace    what is asked           arrivals    when
            └────────────┬────────────────────────────────────┘
                       load       one loop sends it to a target and keeps a timeline per request
                         │
    target    engines (ours, watched by probe: steps, kernel_time)    peers (generate_batch, vLLM, llama.cpp)
                         │
    interleaved_run      systems take turns, repeat after repeat
                         │
    serving, slo         vLLM's metrics of the timelines
    intervals            what a few repeats can say       conclusions    in words
    metric_table         every metric: key, formula, format, better direction
    bench_report         the JSON, `vattn-bench-1`, written;   bench_record    read back

`compare` is the older, smaller sister: one run of random requests, for `vattn compare`.
"""
