# make install, make deb, and the tools they need. Included by ../Makefile.
#
#   make install [DESTDIR=…] [PREFIX=/usr] [LIBDIR=…] [NO_BUILD=1]
#   make deb     [MAINTAINER='Name <address>'] [PALINGENESIS_SLURM=24.05]
#
# Nothing is put where Slurm reads it: the admin enables the plugin, as the
# installed palingenesis.conf explains.
.PHONY: install install-strip uninstall deb tools

PREFIX ?= /usr
# Debian's library directory, else lib64 where there is one, else lib.
LIBDIR ?= $(PREFIX)/$(shell dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null | sed 's|^|lib/|' | grep . || \
	{ [ -e /usr/lib64/libc.so.6 ] && echo lib64 || echo lib; })
DOCDIR ?= $(PREFIX)/share/doc/palingenesis
INSTALL ?= install
# Elsewhere the plugin would not look for the worker.
WORKER_ARGUMENT = $(if $(filter /usr /usr/local,$(PREFIX)),, worker=$(PREFIX)/bin/palingenesis-worker)
# As README.md links to them.
DOCUMENTS = docs etc/examples examples
BUILT = $(or $(CARGO_TARGET_DIR),target)/release

# Files that Slurm opens appear by renaming: a job that starts meanwhile sees the
# old one or the new one.
install:
	$(if $(NO_BUILD),,cargo build --release --workspace)
	$(INSTALL) -d $(DESTDIR)$(LIBDIR)/palingenesis $(DESTDIR)$(PREFIX)/bin \
		$(DESTDIR)$(PREFIX)/share/palingenesis $(DESTDIR)$(DOCDIR)
	$(INSTALL) -m 0644 $(BUILT)/libpalingenesis.so $(DESTDIR)$(LIBDIR)/palingenesis/spank_palingenesis.so.new
	mv $(DESTDIR)$(LIBDIR)/palingenesis/spank_palingenesis.so.new \
		$(DESTDIR)$(LIBDIR)/palingenesis/spank_palingenesis.so
	ln -sfn palingenesis/spank_palingenesis.so $(DESTDIR)$(LIBDIR)/libpalingenesis.so
	$(INSTALL) -m 0755 $(BUILT)/palingenesis $(BUILT)/palingenesis-worker $(DESTDIR)$(PREFIX)/bin
	sed 's|@LIBDIR@|$(LIBDIR)|; s|/usr/share/|$(PREFIX)/share/|; s|^optional .*|&$(WORKER_ARGUMENT)|' \
		etc/palingenesis.conf \
		>$(DESTDIR)$(PREFIX)/share/palingenesis/palingenesis.conf.new
	chmod 0644 $(DESTDIR)$(PREFIX)/share/palingenesis/palingenesis.conf.new
	mv $(DESTDIR)$(PREFIX)/share/palingenesis/palingenesis.conf.new \
		$(DESTDIR)$(PREFIX)/share/palingenesis/palingenesis.conf
	$(INSTALL) -m 0644 etc/palingenesis.toml $(DESTDIR)$(PREFIX)/share/palingenesis/palingenesis.toml.example
	$(if $(wildcard include/palingenesis.h),$(INSTALL) -d $(DESTDIR)$(PREFIX)/include && \
		$(INSTALL) -m 0644 include/palingenesis.h $(DESTDIR)$(PREFIX)/include)
	$(INSTALL) -m 0644 LICENSE $(wildcard README.md) $(DESTDIR)$(DOCDIR)
	for folder in $(DOCUMENTS); do \
		$(INSTALL) -d $(DESTDIR)$(DOCDIR)/$$folder && \
		$(INSTALL) -m 0644 $$folder/*.* $(DESTDIR)$(DOCDIR)/$$folder || exit; \
	done

# As install, without the symbols that only debuggers read.
install-strip: install
	strip --strip-unneeded $(DESTDIR)$(LIBDIR)/palingenesis/spank_palingenesis.so \
		$(DESTDIR)$(PREFIX)/bin/palingenesis $(DESTDIR)$(PREFIX)/bin/palingenesis-worker

# The line before the file: plugstack.conf finds nothing to load, not a gap.
uninstall:
	rm -f $(DESTDIR)$(PREFIX)/share/palingenesis/palingenesis.conf \
		$(DESTDIR)$(PREFIX)/share/palingenesis/palingenesis.toml.example
	rm -f $(DESTDIR)$(LIBDIR)/libpalingenesis.so $(DESTDIR)$(LIBDIR)/palingenesis/spank_palingenesis.so \
		$(DESTDIR)$(PREFIX)/bin/palingenesis $(DESTDIR)$(PREFIX)/bin/palingenesis-worker \
		$(DESTDIR)$(PREFIX)/include/palingenesis.h $(DESTDIR)$(DOCDIR)/LICENSE $(DESTDIR)$(DOCDIR)/README.md
	for folder in $(DOCUMENTS); do \
		for file in $$folder/*.*; do rm -f "$(DESTDIR)$(DOCDIR)/$$file"; done; \
	done
	-cd $(DESTDIR)$(DOCDIR) && rmdir $(DOCUMENTS) etc
	-rmdir $(DESTDIR)$(LIBDIR)/palingenesis $(DESTDIR)$(PREFIX)/share/palingenesis $(DESTDIR)$(DOCDIR)

deb: tools
	packaging/build-deb

# cargo-deb, in target/tools unless it is installed already.
tools:
	@command -v cargo-deb >/dev/null || [ -x target/tools/bin/cargo-deb ] || \
		cargo install cargo-deb --locked --root target/tools
