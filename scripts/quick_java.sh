# Read by scripts whose programs start Spark for a minute: sets what makes its Java quick to start.

# Compiling hot code well, or collecting garbage by threads, would take Java longer than it saves.
java="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
if [ -s .venv/spark.jsa ]; then
    # It may be another Java's by now: then Java goes without it, and says so in the midst of answers.
    java="$java -XX:SharedArchiveFile=$PWD/.venv/spark.jsa -Xshare:auto -Xlog:cds*=off"
fi
export SPARK_SUBMIT_OPTS="${SPARK_SUBMIT_OPTS:-} $java"
