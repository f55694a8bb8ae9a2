from tests.studies.conftest import text  # noqa: F401  # a fixture
