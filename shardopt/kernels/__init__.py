"""How is the arithmetic executed, and in what number format?

One rule becomes a Triton kernel on GPUs and native vector code on CPUs, from one tree, with the same bits. Formats say
in which numbers masters, states and gradients are stored. Nothing here knows a rank, a bucket or a tier.
"""
