"""Tool calls as models write them: declared formats, and one streaming parser for all formats."""
