#!/bin/sh
# Runs pytest with what makes tests quick that start hundreds of processes and a database each.
# Its arguments are pytest's.
set -eu
cd "$(dirname "$0")/.."

# Else each process compiles all that it imports.
unset PYTHONDONTWRITEBYTECODE

# Files of tests and servers are in memory, which nobody waits for, where there is room for them and
# where programs may be run.
in_memory() {
    [ -z "${TMPDIR:-}" ] && [ -w /dev/shm ] || return 1
    ! grep -q '^[^ ]* /dev/shm [^ ]* [^ ]*noexec' /proc/mounts || return 1
    free_kb=$(df -k /dev/shm | awk 'END { print $4 }')
    memory_kb=$(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo)
    [ "$free_kb" -ge 4000000 ] && [ "$memory_kb" -ge 8000000 ]
}
if in_memory; then
    export TMPDIR=/dev/shm
fi

# Compiling hot code well, or collecting garbage by threads, would take Java longer than it saves.
java="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
if [ -s .venv/spark.jsa ]; then
    # It may be another Java's by now: then Java goes without it, and says so in the midst of answers.
    java="$java -XX:SharedArchiveFile=$PWD/.venv/spark.jsa -Xshare:auto -Xlog:cds*=off"
fi
export SPARK_SUBMIT_OPTS="${SPARK_SUBMIT_OPTS:-} $java"

exec .venv/bin/pytest "$@"
