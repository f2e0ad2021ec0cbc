"""What every driver of virtual memory must do, as rules that run on any of them.

    specification.RULES ──> suite.Suite ──(name)──> worker process: Sandbox, rule.check
                                        <─(result)─ pass / fail / not supported

The rules run in a process of their own, because some must fault and any may crash: a poisoned GPU context
dies with its process. `vattn vmm test` prints the table.
"""
