//! Tests against real vocabularies.
