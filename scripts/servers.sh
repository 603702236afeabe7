#!/bin/sh
# Installs the missing servers that tests start, and the tools that check the model, if it may.
# A server that a variable ONCELY_TEST_..._URL names is not needed here.
set -eu
cd "$(dirname "$0")/.."

say() { printf '%s\n' "servers: $*" >&2; }

has() {
    for program in "$@"; do
        command -v "$program" >/dev/null 2>&1 || return 1
    done
}

has_faketime() {
    set -- /usr/lib/*/faketime/libfaketime.so.1
    [ -e "$1" ]
}

has_c_headers() {
    [ -e /usr/include/stdio.h ]
}

has_kafka() {
    [ -e .tools/spark-kafka/.ready ] &&
        { [ -n "${ONCELY_TEST_KAFKA_URL:-}" ] || [ -e .tools/kafka/.ready ]; }
}

find_missing() {
    [ -n "${ONCELY_TEST_POSTGRESQL_URL:-}" ] || has initdb postgres || echo postgresql
    has pgbouncer || echo pgbouncer
    [ -n "${ONCELY_TEST_MYSQL_URL:-}" ] || has mariadb-install-db mariadbd || echo mariadb-server
    [ -n "${ONCELY_TEST_REDIS_URL:-}" ] || has redis-server || echo redis-server
    [ -n "${ONCELY_TEST_RABBITMQ_URL:-}" ] || has rabbitmq-server erl_call || echo rabbitmq-server
    [ -n "${ONCELY_TEST_NATS_URL:-}" ] || has nats-server || echo nats-server
    has_kafka || has mvn || echo maven
    has_kafka || has java || echo default-jre-headless
    has chromium chromedriver || echo chromium chromium-driver
    has_faketime || echo libfaketime
    has spin || echo spin
    has gcc || echo gcc
    has_c_headers || echo libc6-dev
}

# Debian's packages start their servers, unless this file forbids it.
forbid_starting() {
    policy=/usr/sbin/policy-rc.d
    [ ! -e "$policy" ] || return 0
    trap 'rm -f "$policy"' EXIT
    trap 'exit 1' HUP INT TERM
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
}

install_packages() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq &&
        apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"
}

# Debian has no package of Kafka, nor of Spark's source of it: they are a few jars of Maven's.
get_jars() {
    [ -e ".tools/$2/.ready" ] ||
        { mvn --quiet --batch-mode --file "scripts/kafka/$1" dependency:copy-dependencies \
            -DoutputDirectory="$PWD/.tools/$2" -DincludeScope=runtime &&
            touch ".tools/$2/.ready"; }
}

get_kafka() {
    get_jars pom.xml kafka && get_jars spark-pom.xml spark-kafka
}

# Debian does not put programs of servers on the PATH.
PATH=$PATH:/usr/sbin
for folder in /usr/lib/postgresql/*/bin; do
    PATH=$PATH:$folder
done

missing=$(find_missing | tr '\n' ' ')
missing=${missing% }
if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ] && has apt-get; then
        say "installing $missing"
        forbid_starting
        # One package to a word.
        # shellcheck disable=SC2086
        if ! said=$(install_packages $missing 2>&1); then
            printf '%s\n' "$said" | tail -n 20 >&2
            say "tests go without $missing: apt-get failed"
        fi
    else
        say "tests go without what is not installed; type: apt-get install $missing"
    fi
fi

if ! has_kafka && has mvn java; then
    say "bringing Kafka, and Spark's source of it, into .tools"
    if ! said=$(get_kafka 2>&1); then
        printf '%s\n' "$said" | tail -n 20 >&2
        say "tests go without Kafka: Maven failed"
    fi
fi
