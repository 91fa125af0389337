"""Tool calls as models write them: declared formats, and one streaming parser that reads all of them."""
