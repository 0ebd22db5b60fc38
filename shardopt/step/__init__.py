"""What happens in one step?

``step.py`` has the phases and nothing else: masters, survey, agree, decide, update, gather, commit. ``survey.py`` plans
a step and changes nothing, ``launches.py`` makes the kernels' tables, ``update.py`` updates shards chunk by chunk.
``update_in_backward.py`` takes the same steps bucket by bucket, while backward goes on.
"""
