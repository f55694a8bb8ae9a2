from tests.studies.conftest import text

__all__ = ["text"]
