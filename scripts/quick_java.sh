# Read by scripts whose programs start Spark for a minute: sets what makes its Java quick to start.

# Compiling hot code well, or collecting garbage by threads, would take Java longer than it saves.
java="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
if [ -s .venv/spark.jsa ]; then
    # The archive may be of another Java: then Java runs without it, and must not print a warning
    # between a program's lines.
    java="$java -XX:SharedArchiveFile=$PWD/.venv/spark.jsa -Xshare:auto -Xlog:cds*=off"
fi
export SPARK_SUBMIT_OPTS="${SPARK_SUBMIT_OPTS:-} $java"
