"""Who owns what, and how does it move?

Layouts and buckets say which rank owns which elements; reducer and gatherer move gradients and params; ``comm/`` has
the ways over which they move. Nothing here knows a rule, a number format or a tier.
"""
