"""Says whether KV memory is the bottleneck, what else may be, and why it thinks so.

case      what is looked at: a run of a bench JSON, or a snapshot of a running engine
memory    rules about memory         sizes   block and page sizes        prefix   shareable prompts
speed     rules about time           trust   whether the figures can be trusted
diagnose  all rules, and a verdict   text    in words
"""
