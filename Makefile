.DEFAULT_GOAL := help
SHELL := /bin/sh
BIN := .venv/bin
EXAMPLE := examples/notifications

.PHONY: help setup run test test-pythons compiled-tests servers check check-package docs model simulate crash chaos test-spark-faults campaign queue-kills kafka-kills bridge-kills lake-kills relay-kills http-kills bench-ledger bench-transaction bench-consumer bench-queue bench-http bench-pipeline bench-leased bench-spark bench-large bench-lake bench-capacity bench-watching bench-dashboard demo clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/.ready ## make .venv, with a Java runtime where the machine has none

.venv/.ready: pyproject.toml uv.lock scripts/setup.sh
	@scripts/setup.sh

run: .venv/.ready .venv/spark.jsa ## run the main job: the notifications example on Spark
	@test -d $(EXAMPLE)/messages && test -f $(EXAMPLE)/messages.expected.json || \
		$(BIN)/python $(EXAMPLE)/generate.py
	@. scripts/quick_java.sh && $(BIN)/oncely pipeline run $(EXAMPLE)/pipeline.toml
	@$(BIN)/python $(EXAMPLE)/audit.py

test: .venv/.ready servers ## all tests, after lint, types and import rules
	@$(MAKE) --no-print-directory -j 3 check .venv/spark.jsa compiled-tests
	@scripts/pytest.sh -n 5 --dist loadscope --no-loadscope-reorder

test-pythons: .venv/.ready ## core and embedded stores on every Python from 3.11 that is here (ONCELY_TEST_PYTHONS="3.13")
	@scripts/test_pythons.sh

.venv/spark.jsa: .venv/.ready
	@scripts/spark_archive.sh

# Else each of the processes that run them would do it. What is wrong in a file is told by the run.
compiled-tests: .venv/.ready
	@scripts/pytest.sh --collect-only -q >/dev/null || :

servers: ## install the servers that tests start, where that may be done
	@scripts/servers.sh

check: .venv/.ready ## lint, types, import rules
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

check-package: .venv/.ready servers ## build sdist and wheel, look into them, try each extra in a fresh venv
	@$(BIN)/python -c 'import check_wheel_contents, twine' 2>/dev/null || scripts/setup.sh --inexact --group package
	@PYTHONPATH=. scripts/pytest.sh package_tests

docs: .venv/.ready ## build the documentation into build/site, no warning allowed
	@$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --builder dirhtml --jobs auto docs build/site
	@$(BIN)/python scripts/search_words.py build/site

model: .venv/.ready servers ## the model with spin: three modes hold, every mutant is caught in all its modes
	@$(BIN)/python formal/check.py

simulate: .venv/.ready ## many workers over servers that fail on purpose, from SEEDS seeds (SEEDS=10000); then planted bugs
	@$(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),10000)
	@ONCELY_TEST_ALL=1 scripts/pytest.sh -q tests/simulation/test_mutants.py

crash: .venv/.ready servers ## kill a process N times at each named point (N=1000)
	@ONCELY_TEST_ALL=1 ONCELY_TEST_CRASHES=$(or $(N),1000) scripts/pytest.sh tests/crash --timeout 86400

chaos: .venv/.ready servers ## N messages while workers, RabbitMQ and PostgreSQL are struck (N=20000)
	@ONCELY_TEST_ALL=1 ONCELY_TEST_CHAOS=$(or $(N),20000) scripts/pytest.sh -s tests/chaos

test-spark-faults: .venv/.ready servers ## every fault on Spark with N messages in each mode, and a backfill (N=2000)
	@ONCELY_TEST_ALL=1 ONCELY_TEST_SPARK_FAULTS=$(or $(N),2000) ONCELY_TEST_BACKFILL=20000 scripts/pytest.sh -s tests/spark_faults tests/spark/test_batches_killed.py tests/spark/test_backfill.py

campaign: .venv/.ready servers .venv/spark.jsa ## all tests on every store and in every case, not only those in turn; with many more kills, keys and seeds
	@ONCELY_TEST_ALL=1 ONCELY_TEST_KEYS=10000 ONCELY_TEST_KILLS=20 ONCELY_TEST_KILLS_POSTGRESQL=200 ONCELY_TEST_KILLS_MYSQL=100 ONCELY_TEST_RELAYED=5000 ONCELY_TEST_BRIDGE_KILLS=50 ONCELY_TEST_ENDED_SESSIONS=2000 ONCELY_TEST_SEEDS=500 scripts/pytest.sh -n 5 --dist loadscope --no-loadscope-reorder --timeout 3600

queue-kills: .venv/.ready servers ## kill 20 workers at a queue in PostgreSQL, over N messages (N=20000)
	@ONCELY_TEST_ALL=1 ONCELY_TEST_QUEUE_KILLS=$(or $(N),20000) scripts/pytest.sh tests/integration/test_queue_kills.py -k "not kafka"

kafka-kills: .venv/.ready servers ## kill workers at a topic of Kafka, and the broker twice, over N messages (N=100000)
	@ONCELY_TEST_ALL=1 ONCELY_TEST_KAFKA_KILLS=$(or $(N),100000) scripts/pytest.sh tests/integration/test_queue_kills.py -k kafka

bridge-kills: .venv/.ready servers ## kill a bridge N times at each broker that has a source (N=50)
	@ONCELY_TEST_ALL=1 ONCELY_TEST_BRIDGE_KILLS=$(or $(N),50) scripts/pytest.sh tests/integration/test_ready_sources.py -k killed

lake-kills: .venv/.ready .venv/spark.jsa ## N batches of Delta and of Iceberg, by two writers and by a stream, with a kill for every third (N=1000)
	@ONCELY_TEST_LAKE_KILLS=$(or $(N),1000) ONCELY_TEST_ALL=1 scripts/pytest.sh -s tests/lake/test_kills.py tests/spark/test_lake_killed.py --timeout 86400

relay-kills: .venv/.ready servers ## N random commits, rollbacks and kills of producers and relays (N=100000)
	@ONCELY_TEST_RELAY_KILLS=$(or $(N),100000) scripts/pytest.sh -s tests/integration/test_relay_kills.py

http-kills: .venv/.ready servers ## N requests with idempotency keys while servers are killed (N=10000)
	@ONCELY_TEST_ALL=1 ONCELY_TEST_HTTP_REQUESTS=$(or $(N),10000) scripts/pytest.sh -s tests/http/test_under_uvicorn.py --timeout 3600

bench-ledger: .venv/.ready servers ## every store beside the hand-written flow and its own statements sent without it
	@PYTHONPATH=. $(BIN)/python benchmarks/ledger.py

bench-transaction: .venv/.ready servers ## the ledger in work transactions beside the same ones without it
	@PYTHONPATH=. $(BIN)/python benchmarks/transaction.py

bench-consumer: .venv/.ready servers ## a consumer on RabbitMQ, on Kafka, and PostgreSQL beside loops of the driver alone
	@$(BIN)/python -c 'import aiokafka' 2>/dev/null || scripts/setup.sh --inexact --group bench
	@PYTHONPATH=. $(BIN)/python benchmarks/consumer.py
	@PYTHONPATH=. $(BIN)/python benchmarks/kafka.py

bench-queue: .venv/.ready servers ## a queue in PostgreSQL beside procrastinate and pgqueuer
	@$(BIN)/python -c 'import pgqueuer, procrastinate' 2>/dev/null || scripts/setup.sh --inexact --group bench
	@PYTHONPATH=. $(BIN)/python benchmarks/queues.py

bench-http: .venv/.ready servers ## a request with an idempotency key beside one without, and beside asgi-idempotency-header
	@$(BIN)/python -c 'import idempotency_header_middleware' 2>/dev/null || scripts/setup.sh --inexact --group bench
	@PYTHONPATH=. $(BIN)/python -m benchmarks.http_keys

bench-pipeline: .venv/.ready ## the sink beside bare loops, Parquet and dropDuplicates
	@PYTHONPATH=. $(BIN)/python benchmarks/pipeline.py

bench-leased: .venv/.ready servers ## the same with PostgreSQL for the ledger and the bare loops
	@PYTHONPATH=. $(BIN)/python benchmarks/pipeline.py --store postgresql

bench-spark: .venv/.ready servers ## mode rows on PostgreSQL beside COPY without a ledger, and as the ledger grows
	@PYTHONPATH=. $(BIN)/python benchmarks/spark.py

bench-lake: .venv/.ready ## a keyed append of 100,000 rows to Delta and Iceberg beside one without a key
	@PYTHONPATH=. $(BIN)/python benchmarks/lake.py

bench-large: .venv/.ready servers ## what operators ask of ledgers with 30,000,000 and 5,000,000 records
	@PYTHONPATH=. $(BIN)/python benchmarks/large_ledger.py

bench-capacity: .venv/.ready servers ## what a ledger in PostgreSQL needs: bytes, log, flushes, connections
	@PYTHONPATH=. $(BIN)/python benchmarks/capacity.py

bench-watching: .venv/.ready servers ## what it costs writers that operators can look
	@PYTHONPATH=. $(BIN)/python benchmarks/watching.py

bench-dashboard: .venv/.ready servers ## a hundred requests at once to the dashboard, while a consumer works at full speed
	@PYTHONPATH=. $(BIN)/python benchmarks/dashboard_load.py

demo: .venv/.ready ## the dashboard on a ledger with a day of made-up trouble, workers running
	@$(BIN)/python examples/trouble/demo.py

clean: ## remove what the targets made
	rm -rf .venv .tools build $(EXAMPLE)/messages $(EXAMPLE)/messages.expected.json examples/*/out
