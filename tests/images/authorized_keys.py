"""The public keys of all key pairs in EC2, one a line: what an instance's metadata gives to its sshd."""

import re
import sys
import urllib.parse
import urllib.request

REQUEST = {"Action": "DescribeKeyPairs", "Version": "2016-11-15", "IncludePublicKey": "true"}
# moto takes region and service from here and looks at no signature.
CREDENTIAL = "AWS4-HMAC-SHA256 Credential=testing/20260101/us-west-2/ec2/aws4_request, SignedHeaders=host, Signature=none"

request = urllib.request.Request(
    sys.argv[1],
    data=urllib.parse.urlencode(REQUEST).encode(),
    headers={"Authorization": CREDENTIAL},
)
with urllib.request.urlopen(request, timeout=10) as answer:
    text = answer.read().decode()
print("\n".join(re.findall("<publicKey>([^<]*)</publicKey>", text)))
