"""Makes torch-tb-profiler work with present traces: correct numbers, pages without network."""
