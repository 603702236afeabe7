"""Kafka as a transport; the only modules that import confluent-kafka."""
