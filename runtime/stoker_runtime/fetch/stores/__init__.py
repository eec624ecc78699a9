"""Object stores as sources: s3://, gs:// and az://, by obstore (the Rust crate object_store).

`client.py` makes the client, `source.py` lists and reads, `errors.py` says what went wrong. Another store of
object_store is another entry of `client.py`. Must never know: destinations, retries of whole files, progress.
"""
