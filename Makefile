all: build
build:
	cargo build --workspace
