"""The version, in one place that the build can read without importing the package's
dependencies.
"""

__version__ = "0.5.0"
