"""What the tool must show, measured: ratios, both sides in one run. ``python -m benchmarks`` or
``make context``.
"""
