"""torch-tb-profiler kept working: right numbers from traces of today, pages without network."""
