#!/bin/sh
# Makes .venv/spark.jsa: the classes that a pipeline on Spark loads, ready to be mapped into memory.
# With it a test's driver starts in half the time; a Java that cannot make one runs without it.
set -eu
cd "$(dirname "$0")/.."

archive=.venv/spark.jsa
folder=$(mktemp -d "$PWD/.venv/spark-archive.XXXXXX")
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/in"
echo '{"id": "1", "body": "{}"}' >"$folder/in/1.json"
echo 'def handle(message): pass' >"$folder/handlers.py"
cat >"$folder/pipeline.toml" <<'END'
[pipeline]
name = "classes"
consumer = "classes"
ledger = "sqlite:///out/ledger.db"
handler = "handlers:handle"
checkpoint = "out/checkpoint"
quarantine = "out/quarantine"

[source]
format = "json"
path = "in"
schema = "id STRING, body STRING"

[message]
id = "id"
body = "body"
END
# As it is started: scripts/quick_java.sh.
java="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
export SPARK_SUBMIT_OPTS="$java -XX:ArchiveClassesAtExit=$folder/spark.jsa"
# Java writes it as it ends, after the command: only then does nobody hold the other end of the pipe.
said=$(.venv/bin/oncely pipeline run "$folder/pipeline.toml" 2>&1 </dev/null) || {
    printf '%s\n' "$said" >&2
    exit 1
}
if [ -s "$folder/spark.jsa" ]; then
    mv -f "$folder/spark.jsa" "$archive"
else
    # So that it is not tried again.
    : >"$archive"
fi
