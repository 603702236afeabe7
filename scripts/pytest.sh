#!/bin/sh
# Runs pytest so that tests that start hundreds of processes and databases are quick.
# Its arguments are pytest's.
set -eu
cd "$(dirname "$0")/.."

# Else each process compiles all that it imports.
unset PYTHONDONTWRITEBYTECODE

# Files of tests and servers are in memory, which needs no flush, if there is room for them and
# programs may be run there.
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

. scripts/quick_java.sh

exec .venv/bin/pytest "$@"
