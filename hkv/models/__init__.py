"""Whole models built from `hkv.nn`, each in its own module. Importing one imports flax."""
