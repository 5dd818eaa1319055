"""The door: what clients send, judged once. Read `admit`, `values`, `influence`; of files `opened`, `agreed`, `updates`."""
