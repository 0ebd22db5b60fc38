"""Where do states rest?

Each tier is a store with four verbs (fetch, write back, prefetch, flush) and three for a step as a whole (begin,
commit, roll back). Nothing here knows a rule or a rank.
"""
