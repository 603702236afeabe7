"""Two of the files run in turn."""

from tests.turns import in_turn

_FILES = (
    *("test_demo.py", "test_fastapi.py", "test_kafka_pipeline.py", "test_programs.py"),
    *("test_spark_pipeline.py", "test_wsgi.py"),
)

collect_ignore = sorted({*_FILES} - {*in_turn("examples", _FILES, count=2)})
