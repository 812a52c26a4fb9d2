"""Language models' data from streams: tokenised shards of several formats, local or remote, mixed by weights."""
