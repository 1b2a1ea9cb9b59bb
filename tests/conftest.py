"""Makes tests/ importable (pytest puts this file's folder on the path): `from reference import ...`."""
