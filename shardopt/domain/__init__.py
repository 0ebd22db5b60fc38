"""What lies on the ranks that share one set of shards?

A domain joins four folders: the states of a rule (``rules/``) lie in shards over ranks (``partition/``), in a number
format (``kernels/``), on a tier (``offload/``). ``bind.py`` makes its parts once; ``domain.py`` is the table of them;
``domains.py`` has the several domains of one model.
"""
