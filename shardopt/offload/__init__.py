"""Where do states lie between steps?

Each tier is a store with four verbs for chunks (prefetch, fetch, write back, flush) and three for a step as a whole
(begin, commit, roll back). Nothing here knows an update rule or a rank.
"""
