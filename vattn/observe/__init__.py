"""Looking into a running engine, and sharing a device between engines.

watch       counters of the last seconds, lengths of what finished: kept by the engine as it steps
snapshot    everything about one moment, as JSON (`LLM.snapshot()`)
recorder    page maps over time         page_chart, page_html, page_png    drawn
ledger      the file in which engines say who they are and read what they may hold
shares      who gets how much           coordinator    reads and writes the file
member      one engine's side of it     top            a live view of the file
"""
