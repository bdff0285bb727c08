"""The methods of `TraceAnalysis` by topic; each is one question, its work is a module beside."""
