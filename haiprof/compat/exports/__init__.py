"""A run for other tools: tables as CSV and Parquet, counters for Prometheus and OpenTelemetry."""
