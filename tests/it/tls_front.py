"""Speaks TLS on a port of 127.0.0.1, which it prints, and passes what it hears on to another one in the clear.

Usage: tls_front.py CERTIFICATE KEY PORT
"""

import socket
import ssl
import sys
import threading

certificate, key, port = sys.argv[1:]
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(certificate, key)


def pass_on(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def serve(connection):
    try:
        inside = context.wrap_socket(connection, server_side=True)
    except OSError:
        # The client did not like the certificate.
        return
    plain = socket.create_connection(("127.0.0.1", int(port)))
    threading.Thread(target=pass_on, args=(inside, plain), daemon=True).start()
    pass_on(plain, inside)
    inside.close()


listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    connection, _ = listener.accept()
    threading.Thread(target=serve, args=(connection,), daemon=True).start()
