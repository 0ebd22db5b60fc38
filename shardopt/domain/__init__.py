"""What lies on the ranks that share one set of shards?

A domain joins the four: a rule's states lie in shards, partitioned over ranks, in a number format, on a tier.
``bind.py`` makes it once; ``domain.py`` is the table that is left; ``domains.py`` has several of them, for one model.
"""
