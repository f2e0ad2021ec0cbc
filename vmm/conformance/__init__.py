"""The rules that every driver of virtual memory must obey, as checks that run on any driver.

    specification.RULES ──> suite.Suite ──(name)──> worker process: Sandbox, rule.check
                                        <─(result)─ pass / fail / not supported

The rules run in a process of their own, because some must fault and any may crash. A poisoned GPU context
ends with its process. `vattn vmm test` prints the table.
"""
