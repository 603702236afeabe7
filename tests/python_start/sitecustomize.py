"""Run by every Python that tests start. Spark has PySpark in archives, of which nothing is kept
compiled: each of its Pythons would compile for a second. The same is installed here.
"""

import sys

sys.path[:] = [path for path in sys.path if not path.endswith(("pyspark.zip", "-src.zip"))]
