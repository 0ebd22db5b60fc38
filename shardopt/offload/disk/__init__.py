"""How do states lie on a disk?

Each rank has one file, written past the page cache, checked when it is read, and owned by one process at a time. A step
on this tier is a transaction: it holds on all ranks or on none.
"""
