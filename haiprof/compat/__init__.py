"""Other tools' names and formats: HTA, torch-tb-profiler, exports."""
