"""The questions people ask about KV memory, each with an experiment: `vattn bench experiment`.

    base        what an experiment is: measure -> parts, findings(parts), draw(parts)
    setting     the model it runs on, and vattn.lab.bench to run it with
    reading     medians and ratios out of parts        words    the same as parts of sentences
    figures     one look for all figures               record   the JSON, `vattn-experiment-1`
    registry    all of them by name; each is a file of its own

Findings are computed from the record, never written by hand, and say so where noise hides the answer.
"""
