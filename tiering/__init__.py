"""The bytes of a store: where they live, how they move and how they become durable."""
