"""What happens in one step?

``step.py`` has the phases and nothing else; ``survey.py`` says what the gradients hold, ``update.py`` what each shard
and chunk takes. ``update_in_backward.py`` takes the same steps bucket by bucket, while backward goes on.
"""
