"""The coordination protocol, shown without Kafka: its rules, its state, its members."""
