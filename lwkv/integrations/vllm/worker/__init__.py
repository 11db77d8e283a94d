"""A worker's half of the connector: loads and stores, and what it reports."""
