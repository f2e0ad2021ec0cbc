"""The books: which request holds which unit of KV memory. They decide only and import neither torch nor a
driver."""
