"""How do states rest on a disk?

In one file a rank, written around the page cache, checked when read, and owned by one process at a time. A step on
this tier is a transaction: it holds on all ranks or on none.
"""
