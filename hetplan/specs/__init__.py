"""What the user wrote, as frozen records in base units, and the readers that decode it from YAML."""
