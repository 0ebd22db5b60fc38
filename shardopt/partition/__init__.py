"""Which rank owns what, and how does it move? Layout in integers, buckets of storage, collectives by backend."""
