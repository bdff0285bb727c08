"""Attacks on haiprof, and what becomes of them: each one did harm once, and must not again."""
