"""Who owns what, and how does it move?

Layouts and buckets say which rank owns which elements. The reducer moves gradients.
``comm/`` has the mechanisms that carry them. Nothing here knows an update rule or a number format.
"""
