"""P2: An extent is used again only after its deletion has committed."""

from .changes import replace

MUTATIONS = {
    "test_space_of_a_discarded_record_is_free_when_its_deletion_has_committed": {
        "space is free when the deletion has committed": replace(
            "IndexEntries.delete",
            "outcomes = await self.submit_all(...)",
            """
            for _, location in pending:
                location is None or self.free(location)
            outcomes = await self.submit_all(...)
            pending = [(operation, None) for operation, _ in pending]
            """,
        ),
    },
}
